"""Refusals by subject: what a function is given is looked at before any work is done."""
