"""What crosses a boundary: operations, datums, results, errors, and the bodies of the HTTP API. No behaviour."""
