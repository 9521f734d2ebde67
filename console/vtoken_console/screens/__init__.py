"""The main screen and the pages above it."""
