"""The console: a terminal view of a vToken server; it knows the wire and nothing behind it."""
