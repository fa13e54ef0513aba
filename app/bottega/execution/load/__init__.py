"""Load of a worker: its lease, its heartbeat, and turns of tenants on its event loop."""
