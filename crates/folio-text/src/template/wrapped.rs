//! The engine's filters, tests, functions and methods, each with what it may make charged before it runs.
//!
//! Invariant: nothing a template can call is missing here; what is not registered does not exist for it. Charges are upper
//! bounds by the kind of function ([`OutputSize`]), not by what it then does. What is lazy becomes a list.

use minijinja::value::{Rest, Value, ValueKind, ValueOrKwargs};
use minijinja::{Environment, Error, ErrorKind, State, filters, functions, tests};
use minijinja_contrib::pycompat;

use super::guards::{built, listed, printed};
use super::meter::{ELEMENT, Meter, Size, Spent, elements, is_namespace, meter};

/// What a function makes of its arguments, at most.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum OutputSize {
    /// Nothing; it looks at texts.
    Nothing,
    /// A text of a few times the length of its arguments as they are printed.
    Text,
    /// A list of the elements (or characters) of its arguments.
    Elements,
    /// The same, each of them in something else.
    Nested,
    /// The same, and it compares what is in them, so often as sorting does.
    Compared,
    /// Parts of a text.
    Parts,
    /// The first with the second replaced by the third.
    Replaced,
    /// All elements printed, with another argument between.
    Joined,
    /// Lines, each with so many spaces as a number says.
    Indented,
    /// A text with arguments put in, padded as it says.
    Formatted,
    /// As many lists as a number says.
    Groups,
    /// Each element added to all before.
    Sum,
}

/// Makes one of the engine's functions a value.
type Make = fn() -> Value;
type Filter = (&'static str, OutputSize, Make);
/// With its names.
type Test = (&'static [&'static str], Make);

const FILTERS: &[Filter] = &[
    ("safe", OutputSize::Text, || Value::from_function(filters::safe)),
    ("escape", OutputSize::Text, || Value::from_function(filters::escape)),
    ("e", OutputSize::Text, || Value::from_function(filters::escape)),
    ("lower", OutputSize::Text, || Value::from_function(filters::lower)),
    ("upper", OutputSize::Text, || Value::from_function(filters::upper)),
    ("title", OutputSize::Text, || Value::from_function(filters::title)),
    ("capitalize", OutputSize::Text, || Value::from_function(filters::capitalize)),
    ("replace", OutputSize::Replaced, || Value::from_function(filters::replace)),
    ("length", OutputSize::Nothing, || Value::from_function(filters::length)),
    ("count", OutputSize::Nothing, || Value::from_function(filters::length)),
    ("dictsort", OutputSize::Compared, || Value::from_function(filters::dictsort)),
    ("items", OutputSize::Nested, || Value::from_function(filters::items)),
    ("reverse", OutputSize::Elements, || Value::from_function(filters::reverse)),
    ("trim", OutputSize::Text, || Value::from_function(filters::trim)),
    ("join", OutputSize::Joined, || Value::from_function(filters::join)),
    ("split", OutputSize::Parts, || Value::from_function(filters::split)),
    ("lines", OutputSize::Parts, || Value::from_function(filters::lines)),
    ("default", OutputSize::Nothing, || Value::from_function(filters::default)),
    ("d", OutputSize::Nothing, || Value::from_function(filters::default)),
    ("round", OutputSize::Nothing, || Value::from_function(filters::round)),
    ("abs", OutputSize::Nothing, || Value::from_function(filters::abs)),
    ("int", OutputSize::Nothing, || Value::from_function(filters::int)),
    ("float", OutputSize::Nothing, || Value::from_function(filters::float)),
    ("attr", OutputSize::Nothing, || Value::from_function(filters::attr)),
    ("first", OutputSize::Nothing, || Value::from_function(filters::first)),
    ("last", OutputSize::Nothing, || Value::from_function(filters::last)),
    ("min", OutputSize::Compared, || Value::from_function(filters::min)),
    ("max", OutputSize::Compared, || Value::from_function(filters::max)),
    ("sort", OutputSize::Compared, || Value::from_function(filters::sort)),
    ("list", OutputSize::Elements, || Value::from_function(filters::list)),
    ("string", OutputSize::Text, || Value::from_function(filters::string)),
    ("bool", OutputSize::Nothing, || Value::from_function(filters::bool)),
    ("batch", OutputSize::Groups, || Value::from_function(filters::batch)),
    ("slice", OutputSize::Groups, || Value::from_function(filters::slice)),
    ("sum", OutputSize::Sum, || Value::from_function(filters::sum)),
    ("indent", OutputSize::Indented, || Value::from_function(filters::indent)),
    ("select", OutputSize::Elements, || Value::from_function(filters::select)),
    ("reject", OutputSize::Elements, || Value::from_function(filters::reject)),
    ("selectattr", OutputSize::Elements, || Value::from_function(filters::selectattr)),
    ("rejectattr", OutputSize::Elements, || Value::from_function(filters::rejectattr)),
    ("map", OutputSize::Nested, || Value::from_function(filters::map)),
    ("groupby", OutputSize::Compared, || Value::from_function(filters::groupby)),
    ("unique", OutputSize::Compared, || Value::from_function(filters::unique)),
    ("chain", OutputSize::Elements, || Value::from_function(filters::chain)),
    ("zip", OutputSize::Nested, || Value::from_function(filters::zip)),
    ("format", OutputSize::Formatted, || Value::from_function(filters::format)),
    ("tojson", OutputSize::Text, || Value::from_function(super::functions::tojson)),
];

const TESTS: &[Test] = &[
    (&["undefined"], || Value::from_function(tests::is_undefined)),
    (&["defined"], || Value::from_function(tests::is_defined)),
    (&["none"], || Value::from_function(tests::is_none)),
    (&["safe", "escaped"], || Value::from_function(tests::is_safe)),
    (&["boolean"], || Value::from_function(tests::is_boolean)),
    (&["odd"], || Value::from_function(tests::is_odd)),
    (&["even"], || Value::from_function(tests::is_even)),
    (&["divisibleby"], || Value::from_function(tests::is_divisibleby)),
    (&["number"], || Value::from_function(tests::is_number)),
    (&["integer", "int"], || Value::from_function(tests::is_integer)),
    (&["float"], || Value::from_function(tests::is_float)),
    (&["string"], || Value::from_function(tests::is_string)),
    (&["sequence"], || Value::from_function(tests::is_sequence)),
    (&["iterable"], || Value::from_function(super::functions::is_iterable)),
    (&["mapping"], || Value::from_function(tests::is_mapping)),
    (&["startingwith"], || Value::from_function(tests::is_startingwith)),
    (&["endingwith"], || Value::from_function(tests::is_endingwith)),
    (&["lower"], || Value::from_function(tests::is_lower)),
    (&["upper"], || Value::from_function(tests::is_upper)),
    (&["sameas"], || Value::from_function(tests::is_sameas)),
    (&["eq", "equalto", "=="], || Value::from_function(tests::is_eq)),
    (&["ne", "!="], || Value::from_function(tests::is_ne)),
    (&["lt", "lessthan", "<"], || Value::from_function(tests::is_lt)),
    (&["le", "<="], || Value::from_function(tests::is_le)),
    (&["gt", "greaterthan", ">"], || Value::from_function(tests::is_gt)),
    (&["ge", ">="], || Value::from_function(tests::is_ge)),
    (&["in"], || Value::from_function(tests::is_in)),
    (&["true"], || Value::from_function(tests::is_true)),
    (&["false"], || Value::from_function(tests::is_false)),
    (&["filter"], || Value::from_function(tests::is_filter)),
    (&["test"], || Value::from_function(tests::is_test)),
];

const FUNCTIONS: &[(&str, Make)] = &[
    ("range", || Value::from_function(functions::range)),
    ("dict", || Value::from_function(functions::dict)),
    ("namespace", || Value::from_function(functions::namespace)),
];

/// Methods of texts, lists and mappings.
const METHODS: &[(&str, OutputSize)] = &[
    ("replace", OutputSize::Replaced),
    ("join", OutputSize::Joined),
    ("split", OutputSize::Parts),
    ("splitlines", OutputSize::Parts),
    ("format", OutputSize::Formatted),
    ("count", OutputSize::Compared),
    ("keys", OutputSize::Elements),
    ("values", OutputSize::Elements),
    ("items", OutputSize::Nested),
    ("get", OutputSize::Nothing),
    ("find", OutputSize::Nothing),
    ("rfind", OutputSize::Nothing),
    ("startswith", OutputSize::Nothing),
    ("endswith", OutputSize::Nothing),
];

pub(super) fn add_to(environment: &mut Environment<'static>) {
    for (name, makes, function) in FILTERS {
        let function = function();
        environment.add_filter(*name, move |state: &mut State<'_, '_>, args: Rest<ValueOrKwargs>| {
            call(state, &function, *makes, &args.into_values())
        });
    }
    for (names, function) in TESTS {
        for name in *names {
            let function = function();
            environment.add_test(*name, move |state: &mut State<'_, '_>, args: Rest<ValueOrKwargs>| {
                let args = args.into_values();
                charge_test(meter(state), &args)?;
                function.call(state, &args)
            });
        }
    }
    for (name, function) in FUNCTIONS {
        let function = function();
        environment.add_function(*name, move |state: &mut State<'_, '_>, args: Rest<ValueOrKwargs>| {
            construct(state, &function, args.into_values())
        });
    }
    environment.remove_global("debug");
    environment.set_unknown_method_callback(|state, value, method, args| {
        let makes =
            METHODS.iter().find(|(name, _)| *name == method).map_or(OutputSize::Text, |(_, makes)| *makes);
        let whole: Vec<Value> = [value].into_iter().chain(args).cloned().collect();
        charge(meter(state), makes, method == "join", &whole)?;
        let made = pycompat::unknown_method_callback(state, value, method, args)?;
        finished(meter(state), makes, made)
    });
}

fn call(
    state: &mut State<'_, '_>,
    function: &Value,
    makes: OutputSize,
    args: &[Value],
) -> Result<Value, Error> {
    charge(meter(state), makes, false, args)?;
    let made = function.call(state, args)?;
    finished(meter(state), makes, made)
}

fn finished(meter: &mut Meter, makes: OutputSize, made: Value) -> Result<Value, Error> {
    let made = listed(meter, made)?;
    match makes {
        OutputSize::Nested | OutputSize::Compared | OutputSize::Groups if made.as_object().is_some() => {
            built(meter, made)
        }
        _ => Ok(made),
    }
}

/// Lists and mappings from nothing, and namespaces, which nothing may hold.
fn construct(state: &mut State<'_, '_>, function: &Value, args: Vec<Value>) -> Result<Value, Error> {
    for arg in &args {
        let entries = elements(arg);
        meter(state).make(entries.saturating_mul(ELEMENT * 2))?;
        if arg.as_object().is_some() && meter(state).measure(arg)?.has_namespace {
            return Err(Spent::Namespace.into());
        }
    }
    let made = function.call(state, &args)?;
    match made.kind() {
        // The numbers of a range are made one by one.
        ValueKind::Iterable => Ok(made),
        _ if is_namespace(&made) => Ok(made),
        _ => built(meter(state), made),
    }
}

fn charge_test(meter: &mut Meter, args: &[Value]) -> Result<(), Spent> {
    for arg in args {
        match arg.as_str() {
            Some(text) => meter.work(text.len() / 16)?,
            // Only one that is compared with another is walked.
            None if args.len() > 1 && arg.as_object().is_some() => drop(meter.measure(arg)?),
            None => {}
        }
    }
    match args {
        [a, b] if a.as_object().is_some() && b.as_object().is_some() => {
            let nodes = meter.measure(a)?.nodes;
            meter.work(nodes.saturating_mul(elements(b)))
        }
        _ => Ok(()),
    }
}

/// `joiner_first`: as the method has it, the first argument is what comes between.
fn charge(meter: &mut Meter, makes: OutputSize, joiner_first: bool, args: &[Value]) -> Result<(), Error> {
    let Some(first) = args.first() else { return Ok(()) };
    for text in args.iter().filter_map(|arg| arg.as_str()) {
        meter.work(1 + text.len() / 16)?;
    }
    let bytes = match makes {
        OutputSize::Nothing => 0,
        OutputSize::Elements | OutputSize::Nested => {
            args.iter().map(|arg| elements(arg).saturating_mul(ELEMENT * 2)).fold(0, usize::saturating_add)
        }
        OutputSize::Compared => {
            let size = meter.measure(first)?;
            meter.work(
                size.nodes.saturating_add(size.bytes / 16).saturating_mul(1 + size.nodes.ilog2() as usize),
            )?;
            elements(first).saturating_mul(ELEMENT * 2)
        }
        OutputSize::Text => {
            let size = meter.measure(first)?;
            size.bytes.saturating_mul(6).saturating_add(layout(meter, &size, &args[1..])?)
        }
        OutputSize::Parts => {
            let text = first.as_str().unwrap_or_default();
            let parts =
                match args.get(1).and_then(|separator| separator.as_str()).filter(|text| !text.is_empty()) {
                    Some(separator) => text.matches(separator).count(),
                    None => text.chars().filter(|c| c.is_whitespace()).count(),
                };
            text.len().saturating_add((parts + 1).saturating_mul(ELEMENT))
        }
        OutputSize::Replaced => {
            let mut length = |at: usize| args.get(at).map_or(Ok(0), |arg| printed(meter, arg));
            let [text, from, to] = [length(0), length(1), length(2)];
            let (text, from, to) = (text?, from?, to?);
            text.saturating_add((text / from.max(1) + 1).saturating_mul(to))
        }
        OutputSize::Joined => {
            let (list, joiner) =
                if joiner_first { (args.get(1), Some(first)) } else { (Some(first), args.get(1)) };
            let list = list.cloned().unwrap_or_default();
            let between = joiner.map_or(Ok(0), |joiner| printed(meter, joiner))?;
            printed(meter, &list)?.saturating_add(elements(&list).saturating_mul(between))
        }
        OutputSize::Indented => {
            let lines = first.as_str().unwrap_or_default().matches('\n').count() + 1;
            printed(meter, first)?
                .saturating_add(lines.saturating_add(1).saturating_mul(largest_number(args)))
        }
        OutputSize::Formatted => formatted(meter, first, args)?,
        OutputSize::Groups => {
            let all = elements(first).saturating_add(largest_number(args));
            all.saturating_mul(ELEMENT * 2)
        }
        OutputSize::Sum => {
            let size = meter.measure(first)?;
            elements(first).saturating_mul(size.bytes).min(if size.bytes <= elements(first) * 48 + 64 {
                ELEMENT
            } else {
                usize::MAX
            })
        }
    };
    Ok(meter.make(bytes)?)
}

/// Of JSON: what is put around each value, once for each level. A number says at most 64 spaces.
fn layout(meter: &mut Meter, size: &Size, options: &[Value]) -> Result<usize, Spent> {
    let mut given = 0usize;
    for option in options {
        given = given.saturating_add(meter.measure(option)?.bytes.max(64));
    }
    Ok(size.nodes.saturating_mul(given).saturating_mul(size.depth + 2))
}

/// Also of keywords.
fn largest_number(args: &[Value]) -> usize {
    let number = |value: &Value| {
        i128::try_from(value.clone()).ok().map_or(0, |n| usize::try_from(n.max(0)).unwrap_or(usize::MAX))
    };
    let of = |arg: &Value| {
        let named = arg.as_object().filter(|_| arg.is_kwargs()).and_then(|object| object.try_iter_pairs());
        named.into_iter().flatten().map(|(_, value)| number(&value)).chain([number(arg)]).max().unwrap_or(0)
    };
    args.iter().skip(1).map(of).max().unwrap_or(0)
}

/// Each place in the text may have any of the arguments, as wide as any number in it says.
fn formatted(meter: &mut Meter, text: &Value, args: &[Value]) -> Result<usize, Error> {
    let Some(text) = text.as_str() else {
        return Err(Error::new(ErrorKind::InvalidOperation, "only a text can be formatted"));
    };
    let numbers = text.split(|c: char| !c.is_ascii_digit()).filter(|digits| !digits.is_empty());
    let width = numbers.map(|digits| digits.parse().unwrap_or(usize::MAX)).max().unwrap_or(0);
    let mut longest = width.max(largest_number(args));
    for arg in args.iter().skip(1) {
        longest = longest.max(meter.measure(arg)?.bytes.saturating_mul(6));
    }
    let places = text.matches(['%', '{']).count();
    Ok(text.len().saturating_add(places.saturating_mul(longest.saturating_add(400))))
}
