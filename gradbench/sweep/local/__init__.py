"""Warm workers of this machine: a zygote that has imported everything forks a process per cell."""
