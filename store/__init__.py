"""What must survive: the database (operation log, sessions, runs, checkpoints, keys) and the artifact files."""
