"""LaunchPlan -> running ranks: a supervisor here, one node agent (a single file) on each host."""
