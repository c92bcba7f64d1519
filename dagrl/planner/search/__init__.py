"""Search for layouts on a cluster; start with `proposals`."""
