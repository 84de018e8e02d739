"""What a first config of a model and its data says: `myxo init`. Each guess is told with what it is made from."""
