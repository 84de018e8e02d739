"""What files written for slime import, under slime's names (`shared.hooks.import_names`): Myxo's own objects behind them."""
