"""Bytes by category: the audit of a real update and the plan of an imagined one."""
