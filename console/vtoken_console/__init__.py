"""The console: a terminal view of a vToken server. It imports the wire, not the engine."""
