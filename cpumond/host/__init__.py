"""This host: cgroups, systemd, executors of jobs, the program as a service, and its network connections."""
