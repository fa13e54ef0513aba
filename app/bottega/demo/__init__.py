"""``bottega demo``: an ordinary client of the service, with a live view."""
