"""``bottega demo``: a client of the service like any other, with a live view."""
