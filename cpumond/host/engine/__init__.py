"""The engines that start jobs on this host: Docker, Podman, Slurm, Kubernetes. They are only queried, never changed."""
