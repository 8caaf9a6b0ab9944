"""Calls from inside users' own compiled code. Imported when Numba first compiles one."""
