"""What several test modules share: tiny models, rank processes, what this machine can run."""
