"""GPTs and modules of users, with the named axes that growth needs."""
