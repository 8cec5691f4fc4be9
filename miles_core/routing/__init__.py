"""Which engine a request goes to: affinity by session, least load, health and versions; alone or inside a run."""
