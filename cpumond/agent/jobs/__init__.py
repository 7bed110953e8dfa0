"""The jobs that the scheduler orders: what is kept of them, how they start, and what becomes of them."""
