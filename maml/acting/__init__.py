"""Policies: they learn by acting in environments. No other room imports this one."""
