"""The panels of the main screen, one file a widget; each draws a View by the Line API."""
