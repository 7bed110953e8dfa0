"""``cpumond demo``: a scheduler, an agent and real jobs on this machine, live."""
