"""Triggers that keep dstack's `instances.busy_blocks` equal to the blocks of the attached jobs."""
