"""Many runs: sweeps, clusters, comparison of results."""
