"""Alembic's environment and revisions, run by `store/migrate.py`. Not responsible for when they run."""
