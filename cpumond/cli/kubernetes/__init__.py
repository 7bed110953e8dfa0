"""Commands for a Kubernetes cluster."""
