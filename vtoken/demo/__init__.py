"""The demo: an embedded model, real traffic through the OpenAI API, and a headless check of it."""
