"""One file for each resource; a route parses, asks a service and renders. Not responsible for anything else."""
