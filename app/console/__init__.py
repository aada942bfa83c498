"""The web console: its static files, and the addresses that lead to its pages. It holds no secret and knows no user."""
