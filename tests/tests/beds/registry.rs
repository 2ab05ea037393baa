//! Edits of the registry file while agents run: agents follow valid edits, and ignore broken ones.

use std::fs;

use tests::bed::NODES_FILE;
use tests::{Bed, PATIENCE, wait_for};

#[test]
#[ignore = "needs root"]
fn a_broken_edit_keeps_the_last_good_set_and_is_reported_by_line_and_column() -> anyhow::Result<()>
{
    let bed = Bed::builder().nodes(2).start()?;
    bed.wait_all_reachable(PATIENCE)?;
    let good = fs::read_to_string(NODES_FILE)?;
    let broken = good.replace("172.30.0.2", "172.30.0.two");
    let line = broken
        .lines()
        .position(|line| line.contains("two"))
        .unwrap_or_default()
        + 1;
    bed.write_nodes_file(&broken)?;

    let place = format!("line {line}, column ");
    let node = bed.node(1);
    wait_for("the edit to be refused", PATIENCE, || {
        Ok((!node.logged(&[&place, NODES_FILE])?.is_empty()).then_some(()))
    })?;
    let list = node.cli("node list")?;
    assert!(list.stderr.contains(&place), "{list:?}");
    assert!(list.stdout.contains("default/hnode2"), "{list:?}");
    assert_eq!(node.cli("status --probe")?.code, Some(0));

    bed.write_nodes_file(&good)?;
    wait_for("the good edit to be taken", PATIENCE, || {
        Ok(node.cli("node list")?.stderr.is_empty().then_some(()))
    })
}

#[test]
#[ignore = "needs root"]
fn nodes_come_and_go_with_the_file() -> anyhow::Result<()> {
    let bed = Bed::builder().nodes(3).start()?;
    bed.wait_all_reachable(PATIENCE)?;
    let all = fs::read_to_string(NODES_FILE)?;
    let third = all.find("- name: hnode3").expect("an entry");
    bed.write_nodes_file(&all[..third])?;

    let node = bed.node(1);
    wait_for("the third node to go", PATIENCE, || {
        let routes = node.exec("ip route show")?;
        let gone = node.status()?.nodes.len() == 2 && !routes.contains("10.244.3.0/24");
        Ok(gone.then_some(()))
    })?;
    bed.write_nodes_file(&all)?;
    bed.wait_all_reachable(PATIENCE)?;
    assert!(
        node.exec("ip route show")?
            .contains("10.244.3.0/24 via 172.30.0.3")
    );
    Ok(())
}
