"""The HTTP edge: routes, wire codecs, auth, errors, settings, command line. Never imports torch."""
