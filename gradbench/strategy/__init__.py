"""Memory strategies: how one update is computed."""
