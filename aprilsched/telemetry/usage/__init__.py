"""Where the time of the engines goes: busy, or idle for a cause that has a name."""
