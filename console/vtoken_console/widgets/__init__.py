"""The widgets, one per file; each draws a View with the Line API."""
