"""The schema's revisions, oldest first by number. A released one is never changed."""
