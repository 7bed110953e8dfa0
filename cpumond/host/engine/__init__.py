"""The engines that start jobs on this host: Docker, Podman, Slurm, Kubernetes. They are asked, never told anything."""
