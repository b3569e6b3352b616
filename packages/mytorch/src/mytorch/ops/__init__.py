"""Every operation, as a `Function`: its result and its gradients in terms of a backend's protocol."""
