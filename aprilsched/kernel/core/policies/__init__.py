"""The scheduling policies: one small file each, plain functions of what the scheduler observes."""
