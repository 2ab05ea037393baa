//! Tests get programs in their freshly loaded state, whatever earlier tests did with them.

use std::collections::BTreeMap;
use std::process::Command;
use std::sync::Arc;
use std::{fs, thread};

use anyhow::{Context as _, ensure};
use aya::maps::{Map, MapData, MapType, ProgramArray};
use health_common::addr::Addr;
use health_common::config::DatapathConfig;
use health_common::events::{MonitorFilter, Network, WANT_CT, WANT_DROP};
use health_datapath::dump::OpenMap;
use health_datapath::events::Switch as _;
use health_datapath::{Attachment, Attachments, DatapathProgram, layout};
use tests::packet::Tcp;
use tests::process;
use tests::testrun::contents::{Content, Maps};
use tests::testrun::{Pool, TestRun};

const ANY: Network = Network {
    address: Addr { words_be: [0; 4] },
    mask: Addr { words_be: [0; 4] },
};
/// A map that the kernel refuses to change once the programs are loaded.
const CONSTANTS: &str = ".rodata";

fn maps(run: &TestRun) -> anyhow::Result<Maps> {
    Maps::of(&run.location.pins())
}

/// Makes the programs write events and leave other traces of packets.
fn send_packets(run: &mut TestRun) -> anyhow::Result<()> {
    let addresses = ("10.244.1.7".parse()?, "fd00:10:244:1::7".parse()?);
    run.set_health_endpoint(addresses, [2; 6], [4; 6], DatapathConfig::default());
    run.datapath.event_switch()?.set(&MonitorFilter {
        wanted: WANT_DROP | WANT_CT,
        endpoint: 0,
        port_be: 0,
        source: ANY,
        destination: ANY,
        protocol: 0,
        pad: [0; 3],
    })?;
    for source in ["10.244.1.7", "10.9.9.9"] {
        let segment = Tcp {
            flags: 2,
            ..Tcp::default()
        };
        let frame = segment.frame(source.parse()?, "192.0.2.9".parse()?);
        run.run("from_endpoint", &frame);
    }
    Ok(())
}

/// Changes the contents of a map: its first and last value in an array, or some entries.
fn spoil(run: &TestRun, map: &OpenMap, content: &Content) -> anyhow::Result<()> {
    let mut entries = Vec::new();
    match content {
        Content::Entries(_) => {
            let info = MapData::from_id(map.id())?.info()?;
            let (key, value) = (info.key_size() as usize, info.value_size() as usize);
            let is_trie = info.map_type()? == MapType::LpmTrie;
            for byte in 1..=20 {
                let mut key = vec![byte; key];
                if is_trie {
                    key[..4].copy_from_slice(&32_u32.to_ne_bytes());
                }
                entries.push((key, vec![0xff; value]));
            }
        }
        Content::Array(_) => {
            let mut all = Vec::new();
            map.each_raw(|key, value| all.push((key.to_vec(), vec![0xff; value.len()])))?;
            let (first, last) = (all.first().cloned(), all.pop());
            entries.extend(first.into_iter().chain(last));
        }
        Content::Programs(programs) => {
            let data = Map::from_map_data(MapData::from_id(map.id())?)?;
            let mut array = ProgramArray::try_from(data)?;
            let (index, _) = programs.first_key_value().context("no programs")?;
            array.clear_index(index)?;
            let other = run.program("to_endpoint");
            array.set(index + 1, other.fd()?, 0)?;
        }
        // Packets have already written to it.
        Content::Stream(_) => {}
    }
    entries
        .iter()
        .try_for_each(|(key, value)| map.set_raw(key, value))?;
    Ok(())
}

fn spoil_all(run: &mut TestRun, fresh: &BTreeMap<String, Content>) -> anyhow::Result<()> {
    send_packets(run)?;
    let maps = maps(run)?;
    for (name, content) in fresh.iter().filter(|(name, _)| *name != CONSTANTS) {
        spoil(run, &maps.open(name)?, content).with_context(|| format!("map {name}"))?;
    }
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn the_next_test_finds_all_maps_as_they_were_loaded() -> anyhow::Result<()> {
    let pool = Arc::new(Pool::default());
    let fresh = maps(&TestRun::of_pool(&Arc::default()))?.contents()?;
    let pinned = layout::MAPS.map(|map| map.name);
    for name in pinned.into_iter().chain(["HEALTH_DRAFT", CONSTANTS]) {
        assert!(fresh.contains_key(name), "{name}: {:?}", fresh.keys());
    }

    let mut run = TestRun::of_pool(&pool);
    let programs = maps(&run)?.programs();
    let loaded = DatapathProgram::ALWAYS.len() + DatapathProgram::FOR_SOCKETS.len();
    assert_eq!(programs.len(), loaded);
    spoil_all(&mut run, &fresh)?;
    let spoilt = maps(&run)?.contents()?;
    let same = fresh
        .iter()
        .filter(|(name, content)| spoilt[*name] == **content);
    let same: Vec<&str> = same.map(|(name, _)| name.as_str()).collect();
    // The programs log nothing about such packets. The constants include the load time.
    let same = same.iter().filter(|name| **name != CONSTANTS);
    assert!(same.eq(&["AYA_LOGS"]), "all others are spoilt");
    // Reading the stream consumed the events.
    send_packets(&mut run)?;
    run.give_back()?;

    let again = TestRun::of_pool(&pool);
    assert_eq!(maps(&again)?.programs(), programs, "the same programs");
    let now = maps(&again)?.contents()?;
    for (name, content) in &fresh {
        let before = match &**name {
            CONSTANTS => &spoilt[name],
            _ => content,
        };
        assert!(now[name] == *before, "{name}");
    }
    assert_eq!(now.len(), fresh.len());
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn tests_at_the_same_time_have_programs_of_their_own() -> anyhow::Result<()> {
    let pool = Arc::new(Pool::default());
    let (one, other) = (TestRun::of_pool(&pool), TestRun::of_pool(&pool));
    let ids = |run: &TestRun| anyhow::Ok(maps(run)?.programs()["to_netdev"]);
    assert_ne!(ids(&one)?, ids(&other)?);
    drop((one, other));
    assert_eq!(pool.idle(), 2);
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn what_cannot_be_made_as_it_was_is_not_given_back() -> anyhow::Result<()> {
    type Spoil = fn(&mut TestRun) -> anyhow::Result<()>;
    let spoils: [(&str, Spoil); 4] = [
        ("HEALTH_NAT6 is gone", |run| {
            Ok(fs::remove_file(run.location.pins().join("HEALTH_NAT6"))?)
        }),
        ("to_netdev was replaced", |run| {
            let programs = run.location.pins().join("programs");
            fs::remove_file(programs.join("to_netdev"))?;
            Ok(run.program("to_endpoint").pin(programs.join("to_netdev"))?)
        }),
        ("there is a new pin", |run| {
            let other = run.location.bpf_root.join("other");
            Ok(run.program("to_endpoint").pin(other)?)
        }),
        ("will be attached", |run| {
            let attachments = Attachments::all(Attachment::Clsact);
            run.datapath.set_attachments(attachments);
            Ok(())
        }),
    ];
    let pool = Arc::new(Pool::default());
    for (why, spoil) in spoils {
        let mut run = TestRun::of_pool(&pool);
        spoil(&mut run)?;
        let error = run.give_back().err().context("it was given back")?;
        let error = format!("{error:#}");
        assert!(error.contains(why), "{error}");
        assert_eq!(pool.idle(), 0, "{why}");
    }

    let run = TestRun::of_pool(&pool);
    let test = thread::spawn(move || {
        let _run = run;
        panic!("as a test that fails");
    });
    assert!(test.join().is_err());
    assert_eq!(pool.idle(), 0);
    Ok(())
}

#[test]
#[ignore = "needs root"]
fn a_map_of_an_unknown_kind_is_named() -> anyhow::Result<()> {
    let run = TestRun::load_alone();
    let pin = run.location.pins().join("HEALTH_QUEUE");
    let mut bpftool = Command::new("bpftool");
    bpftool.args(["map", "create"]).arg(&pin);
    let words = "type queue value 4 entries 8 name queue";
    process::run(bpftool.args(words.split(' ')))?.success()?;
    let error = maps(&run)?.contents().err().context("it was read")?;
    let error = format!("{error:#}");
    ensure!(
        error.contains("HEALTH_QUEUE") && error.contains("kind unknown"),
        "{error}"
    );
    Ok(())
}
