"""What must be true: one file per promise, each law recounted by a second route."""
