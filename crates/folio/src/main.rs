fn main() {
    if let Err(error) = folio::main() {
        eprintln!("folio: {error:#}");
        std::process::exit(1);
    }
}
