"""The management port: REST, metrics, health. It sees a `ClusterView` and a few verbs, never a shell."""
