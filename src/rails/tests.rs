use super::*;
use crate::topology::Nic;
use fishplate_testing::fabric::{Fake, Persona};
use std::time::Duration;

fn settings(providers: &[&str], interfaces: &[&str]) -> Settings {
    let own = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
    Settings {
        providers: own(providers),
        interfaces: own(interfaces),
        deadline: Duration::from_secs(1),
        ..Settings::DEFAULT
    }
}

fn open_on(fake: &Fake, settings: &Settings, count: usize) -> Result<Vec<OpenRail>, RailsError> {
    let (limits, count) = (Limits::DEFAULT, Some(count));
    let wanted = Wanted { settings, limits, anchor: Anchor::Anywhere, count, devices: false };
    open(wanted, fake.library(), &Machine::default())
}

#[test]
fn rails_are_opened_on_the_named_interfaces() {
    let fake = Fake::new(Persona::efa_direct(), 1);
    let rails =
        open_on(&fake, &settings(&["efa-direct"], &["rdmap2-rdm", "rdmap0-rdm"]), 2).unwrap();
    let told: Vec<_> = rails.iter().map(|rail| (rail.interface.as_str(), rail.mbit)).collect();
    assert_eq!(told, [("rdmap2-rdm", 100_000), ("rdmap0-rdm", 100_000)]);
    let twice =
        open_on(&fake, &settings(&["efa-direct"], &["rdmap2-rdm", "rdmap2-rdm"]), 2).unwrap();
    assert_eq!(twice.len(), 2, "an interface that is named twice carries two rails");
}

#[test]
fn interfaces_used_only_if_named_are_listed_separately() {
    let error = RailsError::TooMany {
        rails: 2,
        provider: "tcp".into(),
        there: vec!["eth0".into()],
        named: false,
        passed_over: vec![
            ("lo".into(), "loopback: reaches this host only"),
            ("eth1".into(), "no link"),
        ],
        limit: 16,
    };
    assert_eq!(
        error.to_string(),
        "cannot open 2 rails: provider \"tcp\" has 1 interface: eth0 (used only if named: lo, \
         loopback: reaches this host only; eth1, no link); use fewer rails, or name an \
         interface once per rail"
    );
    // One of the interfaces has no link.
    let fake = Fake::new(Persona::cxi(), 1);
    let machine = Machine { nics: vec![nic(1, None, LinkState::Down)], ..Machine::default() };
    let settings = settings(&["cxi"], &[]);
    let (anchor, count) = (Anchor::Anywhere, Some(4));
    let wanted =
        Wanted { settings: &settings, limits: Limits::DEFAULT, anchor, count, devices: false };
    let error = open(wanted, fake.library(), &machine).unwrap_err();
    let RailsError::TooMany { there, passed_over, .. } = error else { panic!("{error}") };
    assert_eq!((there.len(), passed_over), (3, vec![("cxi1".to_owned(), "no link")]));
}

#[test]
fn a_provider_without_a_linked_interface_is_not_used() {
    let fake = Fake::new(Persona::cxi(), 1);
    let nics = (0..4).map(|at| nic(at, None, LinkState::Down)).collect();
    let machine = Machine { nics, ..Machine::default() };
    let with = |settings: &Settings, count| {
        let (limits, anchor) = (Limits::DEFAULT, Anchor::Anywhere);
        let wanted = Wanted { settings, limits, anchor, count, devices: false };
        open(wanted, fake.library(), &machine)
    };
    // The provider that follows is tried too.
    for count in [None, Some(1)] {
        let error = with(&settings(&["cxi", "efa"], &[]), count).unwrap_err();
        let RailsError::Provider(refused) = &error else { panic!("{error}") };
        assert_eq!(refused.len(), 2, "{error}");
        let told = error.to_string();
        assert!(told.contains("cxi on cxi3: used only if named, no link"), "{told}");
    }
    let rails = with(&settings(&["cxi"], &["cxi2"]), None).unwrap();
    assert_eq!(rails.len(), 1, "a named interface is used without a link");
}

fn nic(at: u32, node: Option<u32>, link: LinkState) -> Nic {
    let name = format!("cxi{at}");
    Nic { name, interface: None, verbs: None, path: None, node, mbit: Some(200_000), link }
}

#[test]
fn rails_beyond_the_near_nics_use_distant_ones() {
    let fake = Fake::new(Persona::cxi(), 1);
    let nics = (0..4).map(|at| nic(at, Some(at / 2), LinkState::Up)).collect();
    let machine = Machine { nics, ..Machine::default() };
    let settings = settings(&["cxi"], &[]);
    for (count, expected) in [
        (None, &["cxi2", "cxi3"][..]),
        (Some(1), &["cxi2"]),
        (Some(2), &["cxi2", "cxi3"]),
        (Some(3), &["cxi2", "cxi3", "cxi0"]),
        (Some(4), &["cxi2", "cxi3", "cxi0", "cxi1"]),
    ] {
        let anchor = Anchor::Node(1);
        let wanted =
            Wanted { settings: &settings, limits: Limits::DEFAULT, anchor, count, devices: false };
        let rails = open(wanted, fake.library(), &machine).unwrap();
        let names: Vec<_> = rails.iter().map(|rail| rail.interface.as_str()).collect();
        assert_eq!(names, expected, "{count:?}");
    }
}

#[test]
fn processes_of_one_host_without_gpus_share_the_near_nics() {
    let fake = Fake::new(Persona::cxi(), 1);
    let nics = (0..4).map(|at| nic(at, Some(0), LinkState::Up)).collect();
    let machine = Machine { nics, ..Machine::default() };
    for (most, count, expected) in [
        (1, None, [&["cxi0"][..], &["cxi1"], &["cxi2"], &["cxi3"], &["cxi0"]]),
        (16, Some(1), [&["cxi0"], &["cxi1"], &["cxi2"], &["cxi3"], &["cxi0"]]),
        (
            2,
            None,
            [
                &["cxi0", "cxi1"],
                &["cxi2", "cxi3"],
                &["cxi0", "cxi1"],
                &["cxi2", "cxi3"],
                &["cxi0", "cxi1"],
            ],
        ),
        (16, None, [&["cxi0", "cxi1", "cxi2", "cxi3"]; 5]),
    ] {
        for (local_rank, expected) in expected.into_iter().enumerate() {
            let settings = Settings {
                max_rails: most,
                local_rank: Some(local_rank),
                ..settings(&["cxi"], &[])
            };
            let (limits, anchor) = (Limits::DEFAULT, Anchor::Node(0));
            let wanted = Wanted { settings: &settings, limits, anchor, count, devices: false };
            let rails = open(wanted, fake.library(), &machine).unwrap();
            let names: Vec<_> = rails.iter().map(|rail| rail.interface.as_str()).collect();
            assert_eq!(names, expected, "{most} rails, process {local_rank}");
        }
    }
}

#[test]
fn the_first_available_provider_is_used() {
    let fake = Fake::new(Persona::cxi(), 1);
    for asked in [&["efa", "cxi"][..], &["cxi"], &[]] {
        let rails = open_on(&fake, &settings(asked, &[]), 3).unwrap();
        assert!(rails.len() == 3 && rails.iter().all(|rail| rail.provider == "cxi"));
    }
}

#[test]
fn errors_name_what_was_requested_and_what_is_available() {
    let fake = Fake::new(Persona::cxi(), 1);
    let library = settings(&[], &[]);
    let missing = Settings { library: Some("/nowhere/libfabric.so.1".into()), ..library };
    // SAFETY: no library exists at that path.
    let told = RailsError::Load(unsafe { load(&missing) }.unwrap_err()).to_string();
    assert!(told.contains("/nowhere/libfabric.so.1"), "{told}");
    for (settings, count, says) in [
        (settings(&["efa"], &[]), 1, &["efa", "cxi"][..]),
        (settings(&["cxi"], &["mlx5_0"]), 1, &["mlx5_0", "cxi0", "cxi3"]),
        (settings(&["cxi"], &["cxi0"]), 2, &["2 rails", "1 interface named", "cxi0"]),
        (settings(&["cxi"], &[]), 5, &["5 rails", "4 interfaces:", "cxi3"]),
        (Settings { max_rails: 1, ..settings(&["cxi"], &[]) }, 2, &["2 rails", "at most 1"]),
    ] {
        let told = open_on(&fake, &settings, count).unwrap_err().to_string();
        assert!(says.iter().all(|what| told.contains(what)), "{told}");
    }
    let told = open_on(&fake, &settings(&["efa", "cxi"], &["mlx5_0"]), 1).unwrap_err().to_string();
    assert!(told.contains("mlx5_0") && !told.contains("efa"), "{told}");
}
