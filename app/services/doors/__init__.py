"""The doors for clients of other protocols (OpenAI, Anthropic): text in, text out, over the same samples as `asample`.

A door renders a prompt to token ids, submits one `Sample` for it, and turns what comes back into its protocol's shapes.
Not responsible for drawing tokens, or for anything that `asample` does: the log, usage, fairness, access.
"""
