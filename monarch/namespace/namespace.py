"""The namespace of a mount: the tree that it shows, and the changes of it.

Each change checks everything that may refuse it before it changes anything, and refuses as a local
file system does.
"""

from __future__ import annotations

import errno
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from monarch.errors import Refused
from monarch.namespace import listing as listings
from monarch.namespace.overlay import Node
from monarch.namespace.snapshot import Snapshot
from monarch.namespace.tree import Tree, first_name
from monarch.posix import acl
from monarch.posix.acl import Acls
from monarch.types import ROOT_INO, WRITTEN_INO, Attributes, Ino

_KINDS = frozenset(
    (
        stat.S_IFREG,
        stat.S_IFDIR,
        stat.S_IFLNK,
        stat.S_IFIFO,
        stat.S_IFSOCK,
        stat.S_IFCHR,
        stat.S_IFBLK,
    )
)
_DIRECTORY_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Renamed:
    """The result of a rename: the inode that has the new name, and the one that lost it, if any."""

    node: Node
    replaced: Node | None


class Namespace(Tree):
    """The tree with its changes.

    Methods that change something raise Refused with the errno that Linux gives on a local file
    system, and have then changed nothing. ``refresh``, ``forget`` and ``move`` record the state of
    the source. ``differs`` is called when an inode no longer matches the snapshot, so that the
    datapath stops answering from the snapshot.

    Inodes that are made are numbered from ``first_ino`` on, and no number is used twice. Inodes
    that were not used recently are kept in a file beside ``spill``, the path of another; without
    it, in memory.
    """

    def __init__(
        self,
        snapshot: Snapshot,
        differs: Callable[[Ino], None],
        *,
        first_ino: Ino = WRITTEN_INO,
        spill: Path | None = None,
    ) -> None:
        super().__init__(snapshot, differs, first_ino=first_ino, spill=spill)
        # Records that the source has an entry only under another path now.
        self.move = self._known.move
        # Records the extended attributes that the source or the journal has of an inode.
        self.have_xattrs = self._overlay.replace_xattrs
        # Directories that other programs have made at the source since the snapshot.
        self._adopted: set[Ino] = set()
        self._given: Callable[[Ino, bytes], None] = _ignore
        self._taken: Callable[[Ino, bytes], None] = _ignore
        self._directory_changed: Callable[[Ino], None] = _ignore

    def report_names(
        self,
        given: Callable[[Ino, bytes], None],
        taken: Callable[[Ino, bytes], None],
        changed: Callable[[Ino], None],
    ) -> None:
        """Registers functions that follow the changes; called before the first change.

        ``given`` is called with each name that the snapshot does not have, before a process can see
        it, ``taken`` when such a name is removed, and ``changed`` when a directory that was made or
        changed through the mount gets other attributes.
        """
        self._given, self._taken, self._directory_changed = given, taken, changed

    # -- the source ------------------------------------------------------------------------------

    def refresh(self, ino: Ino, attributes: Attributes, acls: Acls | None = None) -> None:
        """Records other attributes of the source, where the entry may exist again, and its access
        control lists if they are known. What was set or removed through the mount is kept."""
        node = self.node(ino)
        if node is None:
            if ino in self._removed or ino >= WRITTEN_INO:
                return
        elif not node.names and ino != ROOT_INO:
            return
        else:
            node.follow(attributes)
            if acls is not None and not (node.object or node.keeps_mode):
                self._overlay.replace_xattrs(node, acl.with_acls(node.xattrs, acl.NO_ACLS))
            self._changed(node)
        self._known.refresh(ino, attributes, acls)

    def forget(self, ino: Ino) -> None:
        """Records that the source has lost an entry, which is then not shown. A file whose bytes
        were written through the mount stays."""
        if ino == ROOT_INO:
            raise ValueError("the root of a mount cannot go")
        node = self.node(ino)
        if node is None or not node.object:
            self._known.forget(ino)

    # -- new names -------------------------------------------------------------------------------

    def copy_up(self, ino: Ino) -> Node:
        """The node of an inode; one of the snapshot gets a node, with the names that the source has
        not lost. Raises Refused, ESTALE, if it is forgotten."""
        node = self.node(ino)
        if node is not None:
            return node
        self._require_known(ino)
        if ino in self._removed:
            raise Refused(errno.ESTALE)
        return self._copy_up(ino, dict.fromkeys(self._names_below(ino)))

    def _copy_up(self, ino: Ino, names: dict[tuple[Ino, bytes], None]) -> Node:
        now = self._known.attributes(ino)
        target = self.snapshot.readlink(ino) if stat.S_ISLNK(now.mode) else b""
        node = _node_of(now, ino, now.parent, nlink=now.nlink, target=target)
        node.names = names
        if not names and ino != ROOT_INO:
            node.nlink = 0
        self._known.differs(ino)
        self._overlay.add(node)
        return node

    def copy_up_all(self, ino: Ino) -> None:
        """Copies up a directory and everything beneath it, so that it can be renamed."""
        self.copy_up(ino)
        for _, _, attributes in list(self._entries(ino, 0, None)):
            if attributes.is_dir:
                self.copy_up_all(attributes.ino)
            else:
                self.copy_up(attributes.ino)

    def make(
        self,
        parent: Ino,
        name: bytes,
        *,
        mode: int,
        uid: int,
        gid: int,
        now_ns: int,
        umask: int | None = None,
        rdev: int = 0,
        target: bytes = b"",
        object: int = 0,
        ino: Ino | None = None,
    ) -> Node:
        """A new inode of the kind in ``mode``: ``target`` of a symbolic link, ``rdev`` of a device,
        ``object`` of a file. In a directory with the set-group-ID bit it gets that group. The
        default ACL of the directory, or else ``umask``, limits the mode, and the inode inherits the
        ACL; None, as in a replay: the mode is final, and the caller sets the ACLs.

        Its number is the next one, or ``ino``, as in a replay. Raises Refused; ValueError if
        ``ino`` is used.
        """
        kind = stat.S_IFMT(mode)
        if kind not in _KINDS:
            raise Refused(errno.EINVAL)
        if kind == stat.S_IFLNK:
            listings.require_target(target)
        self._require_free(parent, name)
        number = self._overlay.number(ino)
        directory = self.copy_up(parent)
        is_dir = kind == stat.S_IFDIR
        if directory.mode & stat.S_ISGID:
            gid = directory.gid
            if is_dir:
                mode |= stat.S_ISGID
        acls = acl.NO_ACLS
        if umask is not None and kind != stat.S_IFLNK:
            default = self.acls(parent).default if self.has_acls else b""
            mode, acls = acl.inherited(default, mode, umask)
        size = _DIRECTORY_BYTES if is_dir else len(target)
        node = Node(
            ino=number,
            parent=parent,
            mode=mode,
            uid=uid,
            gid=gid,
            nlink=2 if is_dir else 1,
            mtime_ns=now_ns,
            ctime_ns=now_ns,
            atime_ns=now_ns,
            rdev=rdev if kind in (stat.S_IFCHR, stat.S_IFBLK) else 0,
            size=size,
            blocks=size // 512 if is_dir else 0,
            target=target,
            object=object,
            is_separate=object != 0,
            xattrs=acl.with_acls({}, acls),
            keeps_mode=True,
            keeps_owner=True,
            keeps_times=True,
        )
        self._overlay.add(node)
        self._put(parent, name, node)
        _count(directory, is_dir)
        self._touch(directory, now_ns)
        return node

    def adopt(self, parent: Ino, name: bytes, now: Attributes, *, target: bytes = b"") -> Node:
        """Shows an entry that another program has made at the source: an inode with the next number
        and otherwise the attributes ``now``. The name must be free. Raises Refused."""
        self._require_directory(parent)
        directory, number, is_dir = self.copy_up(parent), self._overlay.number(), now.is_dir
        nlink = max(2, now.nlink) if is_dir else 1
        node = _node_of(now, number, parent, nlink=nlink, target=target)
        node.source_ino = now.source_ino
        self._overlay.add(node)
        self._put(parent, name, node)
        if is_dir:
            _count(directory, True)
            self._changed(directory)
            self._adopted.add(number)
        return node

    def link(self, ino: Ino, parent: Ino, name: bytes, *, now_ns: int) -> Node:
        """Another name of anything but a directory. Raises Refused."""
        self._require_free(parent, name)
        attributes = self.attributes(ino)
        if attributes.is_dir:
            raise Refused(errno.EPERM)
        if self.is_gone(ino):
            raise Refused(errno.ENOENT)
        if attributes.nlink >= listings.LINK_MAX:
            raise Refused(errno.EMLINK)
        node, directory = self.copy_up(ino), self.copy_up(parent)
        self._put(parent, name, node)
        _keep_acls(self, node, parent)
        node.is_separate = True
        node.nlink += 1
        node.ctime_ns = now_ns
        self._touch(directory, now_ns)
        return node

    # -- removed and changed names -----------------------------------------------------------------

    def unlink(self, parent: Ino, name: bytes, *, now_ns: int) -> Node:
        """Removes a name of anything but a directory. After the last name the caller calls
        ``forget_node`` when no process has it open. Raises Refused."""
        self._require_directory(parent)
        listings.require_name(name, errno.EISDIR, errno.EISDIR)
        ino = self._require(parent, name)
        if self.attributes(ino).is_dir:
            raise Refused(errno.EISDIR)
        node, directory = self.copy_up(ino), self.copy_up(parent)
        self._remove(node, parent, name, now_ns)
        self._touch(directory, now_ns)
        return node

    def rmdir(self, parent: Ino, name: bytes, *, now_ns: int) -> Node:
        """Removes an empty directory. Raises Refused."""
        self._require_directory(parent)
        listings.require_name(name, errno.EINVAL, errno.ENOTEMPTY)
        ino = self._require(parent, name)
        if not self.attributes(ino).is_dir:
            raise Refused(errno.ENOTDIR)
        self._require_empty(ino)
        node, directory = self.copy_up(ino), self.copy_up(parent)
        self._remove(node, parent, name, now_ns)
        _discount(directory)
        self._touch(directory, now_ns)
        return node

    def hide(self, parent: Ino, name: bytes, *, now_ns: int) -> None:
        """Removes a name of anything, a directory with its content, in a replay: another program
        has used the name since. Raises Refused."""
        node, directory = self.copy_up(self._require(parent, name)), self.copy_up(parent)
        if node.is_dir:
            _leave_other_names(self, node.ino, now_ns)
        self._remove(node, parent, name, now_ns)
        if node.is_dir:
            _discount(directory)
            self._changed(directory)

    def forget_node(self, ino: Ino) -> None:
        """No process has an inode without names open any more. Raises ValueError if it has one."""
        node = self.node(ino)
        if node is None:
            return
        if node.names or ino == ROOT_INO:
            raise ValueError(f"inode {ino} has a name")
        self._overlay.forget(node)
        self._adopted.discard(ino)
        self._changed(node)

    def rename(
        self,
        parent: Ino,
        name: bytes,
        to_parent: Ino,
        to_name: bytes,
        *,
        flags: int = 0,
        now_ns: int,
        is_again: bool = False,
    ) -> Renamed | None:
        """Gives an inode another name, in place of the inode that has that.

        None if both are names of one inode: nothing happens then. Raises Refused; EXDEV for a
        directory of the snapshot, or of another program: its content is found at the source by its
        path, so the caller must copy it, as between file systems. That does not apply to a rename
        that was made before and ``is_again`` made: everything beneath it is copied up
        (``copy_up_all``).
        """
        if flags & ~listings.RENAME_NOREPLACE:
            raise Refused(errno.EINVAL)
        self._require_directory(parent)
        self._require_directory(to_parent)
        listings.require_name(name, errno.EBUSY, errno.EBUSY)
        if to_name in listings.DOTS:
            raise Refused(errno.EEXIST if flags & listings.RENAME_NOREPLACE else errno.EBUSY)
        ino = self._require(parent, name)
        listings.require_name(to_name, errno.EBUSY, errno.EBUSY)
        existing = self.lookup(to_parent, to_name)
        self._require_order(ino, existing, parent=parent, to_parent=to_parent, flags=flags)
        if existing == ino:
            return None
        is_dir = self.attributes(ino).is_dir
        if existing is not None:
            if is_dir != self.attributes(existing).is_dir:
                raise Refused(errno.ENOTDIR if is_dir else errno.EISDIR)
            if is_dir:
                self._require_empty(existing)
        if is_dir and (ino < WRITTEN_INO or ino in self._adopted) and not is_again:
            raise Refused(errno.EXDEV)

        node, directory, to_directory = (
            self.copy_up(ino),
            self.copy_up(parent),
            self.copy_up(to_parent),
        )
        replaced = None if existing is None else self.copy_up(existing)
        if replaced is not None:
            self._unname(replaced, to_parent, to_name, now_ns)
            if is_dir:
                _discount(to_directory)
        self._free(parent, name)
        del node.names[parent, name]
        self._put(to_parent, to_name, node)
        _keep_acls(self, node, to_parent)
        node.is_separate = True
        node.parent = first_name(node)[0]
        node.ctime_ns = now_ns
        if is_dir:
            _discount(directory)
            _count(to_directory, True)
            self._changed(node)
        self._touch(directory, now_ns)
        self._touch(to_directory, now_ns)
        return Renamed(node, replaced)

    # -- attributes --------------------------------------------------------------------------------

    def change(
        self,
        ino: Ino,
        *,
        mode: int | None = None,
        uid: int | None = None,
        gid: int | None = None,
        atime_ns: int | None = None,
        mtime_ns: int | None = None,
        size: int | None = None,
        now_ns: int,
    ) -> Node:
        """Sets the given attributes, and the change time. Of ``mode`` the permission bits count.

        A new owner removes the set-user-ID and set-group-ID bits, except from a directory. A new
        size changes the modification time and the number only: the caller changes the bytes. Raises
        Refused: EISDIR or EINVAL for the size of anything but a file.
        """
        if size is not None:
            attributes = self.attributes(ino)
            if size < 0 or not (attributes.is_file or attributes.is_dir):
                raise Refused(errno.EINVAL)
            if attributes.is_dir:
                raise Refused(errno.EISDIR)
        node = self.copy_up(ino)
        if mode is not None:
            node.mode = stat.S_IFMT(node.mode) | stat.S_IMODE(mode)
            node.hidden_bits, node.keeps_mode = 0, True
        if uid is not None or gid is not None:
            node.uid = node.uid if uid is None else uid
            node.gid = node.gid if gid is None else gid
            node.keeps_owner = True
            if mode is None and not node.is_dir:
                node.drop_privileges_of_owner()
        if size is not None:
            node.size = size
            node.touch(now_ns)
        if atime_ns is not None or mtime_ns is not None:
            node.atime_ns = node.atime_ns if atime_ns is None else atime_ns
            node.mtime_ns = node.mtime_ns if mtime_ns is None else mtime_ns
            node.keeps_times = True
        node.ctime_ns = now_ns
        self._changed(node)
        return node

    def set_xattr(self, ino: Ino, name: bytes, value: bytes | None, *, now_ns: int) -> Node:
        """Sets an extended attribute, or removes it if ``value`` is None. Raises Refused: ENOSPC if
        an inode's attributes get too many bytes, ENODATA if there is none to be removed."""
        if value is None:
            known = self._overlay.peek(ino)
            if known is None or name not in known.xattrs:
                raise Refused(errno.ENODATA)
        node = self.copy_up(ino)
        xattrs = {key: kept for key, kept in node.xattrs.items() if key != name}
        if value is not None:
            xattrs = node.xattrs | {name: value}
            if sum(len(key) + len(kept) for key, kept in xattrs.items()) > listings.XATTRS_MAX:
                raise Refused(errno.ENOSPC)
        self._overlay.replace_xattrs(node, xattrs)
        node.ctime_ns = now_ns
        self._changed(node)
        return node

    # -- checks ------------------------------------------------------------------------------------

    def _require(self, parent: Ino, name: bytes) -> Ino:
        ino = self.lookup(parent, name)
        if ino is None:
            raise Refused(errno.ENOENT)
        return ino

    def _require_directory(self, ino: Ino) -> None:
        is_forgotten = ino >= WRITTEN_INO and not self.is_written(ino)
        if not is_forgotten and not self.attributes(ino).is_dir:
            raise Refused(errno.ENOTDIR)
        if self.is_gone(ino):
            raise Refused(errno.ENOENT)

    def _require_free(self, parent: Ino, name: bytes) -> None:
        self._require_directory(parent)
        listings.require_name(name, errno.EEXIST, errno.EEXIST)
        if self.lookup(parent, name) is not None:
            raise Refused(errno.EEXIST)

    def _require_empty(self, ino: Ino) -> None:
        if ino < WRITTEN_INO and not self._known.is_listed(ino):
            raise Refused(errno.ENOTEMPTY)
        for _ in self._entries(ino, 0, None):
            raise Refused(errno.ENOTEMPTY)

    def _require_order(
        self, ino: Ino, existing: Ino | None, *, parent: Ino, to_parent: Ino, flags: int
    ) -> None:
        """A rename must not put a directory beneath itself, nor replace one that it is in."""
        if existing is not None and flags & listings.RENAME_NOREPLACE:
            raise Refused(errno.EEXIST)
        if self._is_at_or_above(ino, to_parent):
            raise Refused(errno.EINVAL)
        if existing is not None and self._is_at_or_above(existing, parent):
            raise Refused(errno.ENOTEMPTY)

    # -- how ---------------------------------------------------------------------------------------

    def _put(self, parent: Ino, name: bytes, node: Node) -> None:
        """Gives an inode a name that is free in the mount."""
        in_snapshot = self._listings.in_snapshot(parent, name)
        before = self._listings.find(parent, name)
        is_new = not before and not in_snapshot
        if before is None and in_snapshot:
            before = self.snapshot.lookup(parent, name)
        if before:
            self._displace(before, parent, name)
        self._listings.put(parent, name, node.ino, in_snapshot=in_snapshot)
        if is_new:
            self._given(parent, name)
        node.names[parent, name] = None

    def _displace(self, ino: Ino, parent: Ino, name: bytes) -> None:
        """The source has lost the inode that had a name; if the source has it again, it does not
        get the name back."""
        lost = self.node(ino) or self._copy_up(ino, dict.fromkeys(self._known.names(ino)))
        if (parent, name) in lost.names:
            self._unname(lost, parent, name, lost.ctime_ns)

    def _displace_all(self, directory: Ino) -> None:
        """A directory is removed in which all remaining entries are lost at the source."""
        if not self._known.gone:
            return
        listing = self._listings.get(directory)
        if listing is None:
            listing = listings.Listing(directory)
        if directory < WRITTEN_INO:
            for name, attributes in self.snapshot.list_from(directory, 0):
                if ino := listing.changed.get(name, attributes.ino):
                    self._displace(ino, directory, name)
        for _, name, ino in list(listing.added(listings.ADDED_INDEX, listing.end)):
            self._displace(ino, directory, name)

    def _remove(self, node: Node, parent: Ino, name: bytes, now_ns: int) -> None:
        """Takes a name from an inode, after which the name is free."""
        self._free(parent, name)
        self._unname(node, parent, name, now_ns)

    def _free(self, parent: Ino, name: bytes) -> None:
        if not self._listings.remove(parent, name):
            self._taken(parent, name)

    def _unname(self, node: Node, parent: Ino, name: bytes, now_ns: int) -> None:
        node.ctime_ns = now_ns
        del node.names[parent, name]
        if node.names:
            node.nlink -= 1
            node.parent = first_name(node)[0]
            return
        # Names outside the mount do not count: no process reaches it by them.
        node.nlink = 0
        if node.is_dir:
            self._displace_all(node.ino)
            self._listings.drop(node.ino)
            self._changed(node)
        if node.ino < WRITTEN_INO:
            self._removed.add(node.ino)

    def _touch(self, directory: Node, now_ns: int) -> None:
        directory.touch(now_ns)
        self._directory_changed(directory.ino)

    def _changed(self, node: Node) -> None:
        """The attributes of an inode have changed."""
        if node.is_dir:
            self._directory_changed(node.ino)


def _ignore(ino: Ino, name: bytes = b"") -> None:
    """The change is not followed."""


def _node_of(now: Attributes, ino: Ino, parent: Ino, *, nlink: int, target: bytes) -> Node:
    """A node with attributes of the source."""
    return Node(
        ino=ino,
        parent=parent,
        mode=now.mode,
        uid=now.uid,
        gid=now.gid,
        nlink=nlink,
        mtime_ns=now.mtime_ns,
        ctime_ns=now.ctime_ns,
        atime_ns=now.mtime_ns,
        rdev=now.rdev,
        size=now.size,
        blocks=now.blocks,
        source_ino=now.source_ino,
        target=target,
    )


def _keep_acls(names: Namespace, node: Node, parent: Ino) -> None:
    """Records of a file that has no ACL that it gets none in its new directory: the drain may make
    it there, where the source would give it one."""
    has_none = names.has_acls and node.object and not names.acls(node.ino).access
    if has_none and names.acls(parent).default:
        names.have_xattrs(node, {**node.xattrs, acl.ACCESS: b""})


def _leave_other_names(names: Namespace, directory: Ino, now_ns: int) -> None:
    """Takes the names beneath a directory that is to be hidden from files with other names."""
    for _, name, attributes in list(names._entries(directory, 0, None)):
        if attributes.is_dir:
            _leave_other_names(names, attributes.ino, now_ns)
        elif attributes.nlink > 1 and len((node := names.copy_up(attributes.ino)).names) > 1:
            names._remove(node, directory, name, now_ns)


def _count(directory: Node, is_dir: bool) -> None:
    """An entry was added. Some file systems do not count directories: theirs have 1 link."""
    if is_dir and directory.nlink > 1:
        directory.nlink += 1


def _discount(directory: Node) -> None:
    """A directory was removed from it."""
    if directory.nlink > 2:
        directory.nlink -= 1
