"""The pages that open over the main screen."""
