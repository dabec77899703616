"""Several processes: groups in one shape, memory that a host's ranks share, one-sided messages, who is late."""
