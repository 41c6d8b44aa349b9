"""The management port: REST, metrics, health, the web page. It sees a `ClusterView` and a few verbs, never a shell."""
