"""Client protocols: each file turns one protocol's requests into a `Conversation` and a call's outcome into its answer."""
