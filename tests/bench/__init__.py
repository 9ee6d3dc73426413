"""What the triggers cost, on dstack's own schema and statements. `python -m bench` in tests/ prints the tables.

Without and with the triggers in one run, alternating, on copies of one database; and beside them what others
do. Each line says on how many rows it worked, and that the counters are the truth afterwards.
"""
