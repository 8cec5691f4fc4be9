"""Publishing a policy version: one verified transaction for every transport."""
