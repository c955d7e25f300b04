"""`penstock reload | sleep | wake`, and what the server does for them."""
