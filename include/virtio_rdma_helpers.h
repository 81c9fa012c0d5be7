/* SPDX-License-Identifier: GPL-2.0 */
/*
 * C functions for what the kernel's headers have as inline functions or macros
 * only, so that Rust can call them, and for members of struct net_device and
 * struct pci_dev, which bindgen does not see in every configuration. Each is
 * named after what it stands for and does nothing else. The last ones are
 * operations of the RDMA core, for the sake of their types.
 */
#ifndef _VIRTIO_RDMA_HELPERS_H
#define _VIRTIO_RDMA_HELPERS_H

#include <linux/netdevice.h>
#include <linux/spinlock.h>
#include <linux/tracepoint-defs.h>
#include <linux/virtio.h>
#include <linux/virtio_config.h>
#include <net/netlink.h>
#include <rdma/ib_umem.h>
#include <rdma/ib_verbs.h>
#include <rdma/iter.h>

struct module *virtio_rdma_this_module(void);
bool virtio_rdma_module_get(void);

void virtio_rdma_store_release(u32 *word, u32 value, bool behind_bus);
u32 virtio_rdma_load_acquire(const u32 *word, bool behind_bus);
void virtio_rdma_mb(bool behind_bus);
void virtio_rdma_set_max_seg_size(struct device *dev, unsigned int size);

unsigned long virtio_rdma_spin_lock_irqsave(spinlock_t *lock);
bool virtio_rdma_spin_trylock_irqsave(spinlock_t *lock, unsigned long *flags);
void virtio_rdma_spin_unlock_irqrestore(spinlock_t *lock, unsigned long flags);
void virtio_rdma_lockdep_assert_held(spinlock_t *lock);
void virtio_rdma_reinit_completion(struct completion *completion);
void virtio_rdma_synchronize_rcu_tasks(void);
void virtio_rdma_flush_ib_wq(void);
unsigned int virtio_rdma_memalloc_noio_save(void);
void virtio_rdma_memalloc_noio_restore(unsigned int flags);
struct workqueue_struct *virtio_rdma_alloc_workqueue(const char *name,
						     bool freezable);

bool virtio_rdma_has_feature(const struct virtio_device *vdev,
			     unsigned int fbit);
u64 virtio_rdma_offered_features(struct virtio_device *vdev);
void virtio_rdma_set_feature(struct virtio_device *vdev, unsigned int fbit);
void virtio_rdma_clear_feature(struct virtio_device *vdev, unsigned int fbit);
int virtio_rdma_find_vqs(struct virtio_device *vdev, unsigned int nvqs,
			 struct virtqueue *vqs[], struct virtqueue_info info[]);
void virtio_rdma_del_vqs(struct virtio_device *vdev);
bool virtio_rdma_has_queues(struct virtio_device *vdev);
void virtio_rdma_no_queues(struct virtio_device *vdev);
void virtio_rdma_wait_no_queues(struct virtio_device *vdev);
void virtio_rdma_device_ready(struct virtio_device *vdev);
u8 virtio_rdma_get_status(struct virtio_device *vdev);
void virtio_rdma_device_lock(struct device *dev);
bool virtio_rdma_device_trylock(struct device *dev);
void virtio_rdma_device_unlock(struct device *dev);
unsigned int virtio_rdma_part_of_cpu(unsigned int index, unsigned int count,
				     unsigned int parts);
int virtio_rdma_set_affinity(struct virtqueue *vq, unsigned int part,
			     unsigned int parts);
bool virtio_rdma_iommu_mapped(struct device *dev);

void virtio_rdma_sg_init_dma(struct scatterlist *sg, dma_addr_t addr,
			     unsigned int len);

void virtio_rdma_command_failed(struct device *dev, const char *command,
				int command_len, const char *status,
				int status_len);

DECLARE_TRACEPOINT(post_send);
DECLARE_TRACEPOINT(post_recv);
DECLARE_TRACEPOINT(complete);
DECLARE_TRACEPOINT(command);
DECLARE_TRACEPOINT(refuse);
void virtio_rdma_trace_post_send(const struct ib_qp *qp,
				 const struct ib_send_wr *wr);
void virtio_rdma_trace_post_recv(const struct ib_qp *qp,
				 const struct ib_recv_wr *wr);
void virtio_rdma_trace_post_srq_recv(const struct ib_srq *srq, u32 srqn,
				     const struct ib_recv_wr *wr);
void virtio_rdma_trace_complete(const struct ib_qp *qp, const struct ib_wc *wc);
void virtio_rdma_trace_command(const struct device *dev, const char *name,
			       int len, int error, u64 nsecs);
void virtio_rdma_trace_refuse(int error, const char *reason, u64 number,
			      u64 limit);

const struct uapi_definition *virtio_rdma_uapi_definitions(void);

int virtio_rdma_is_udata_in_empty(struct ib_udata *udata);
int virtio_rdma_respond_empty_udata(struct ib_udata *udata);

struct ib_umem *virtio_rdma_umem_get(struct ib_device *device,
				     unsigned long addr, size_t size,
				     int access);
struct ib_umem *virtio_rdma_umem_get_cq_buf(struct ib_device *device,
					    struct ib_udata *udata, size_t size,
					    int access);
struct ib_umem *virtio_rdma_umem_get_qp_buf(struct ib_device *device,
					    struct ib_udata *udata, size_t size,
					    int access);
void *virtio_rdma_umem_vmap(struct ib_umem *umem);
void virtio_rdma_umem_vunmap(struct ib_umem *umem, void *start);
bool virtio_rdma_umem_store(struct ib_umem *umem, void *mapped, size_t offset,
			    u32 value);
bool virtio_rdma_umem_load(struct ib_umem *umem, void *mapped, size_t offset,
			   u32 *value);
size_t virtio_rdma_umem_num_blocks(struct ib_umem *umem, unsigned long pgsz);
void virtio_rdma_block_iter_start(struct ib_block_iter *iter,
				  struct ib_umem *umem, unsigned long pgsz);
size_t virtio_rdma_block_iter_list(struct ib_block_iter *iter, __le64 *list,
				   size_t max);

void virtio_rdma_dev_put(struct net_device *ndev);
struct net_device *virtio_rdma_notifier_netdev(void *info);
bool virtio_rdma_netdev_own_mac(const struct net_device *ndev,
				struct ib_device *ibdev, u8 *mac);
bool virtio_rdma_netdev_is_moving(const struct net_device *ndev);
struct net *virtio_rdma_get_net(struct ib_device *ibdev);
void virtio_rdma_put_net(struct net *net);
struct device *virtio_rdma_parent_of(struct device *dev);
bool virtio_rdma_netdev_is_pci_sibling(const struct net_device *ndev,
				       struct device *dev);
unsigned int virtio_rdma_netdev_port_state(struct net_device *ndev);
unsigned int virtio_rdma_netdev_port_mtu(const struct net_device *ndev);

unsigned int virtio_rdma_num_online_cpus(void);
bool virtio_rdma_need_resched(void);

struct nlattr *virtio_rdma_nla_nest_start(struct sk_buff *skb, int attrtype);
int virtio_rdma_nla_nest_end(struct sk_buff *skb, struct nlattr *start);
void virtio_rdma_nla_nest_cancel(struct sk_buff *skb, struct nlattr *start);

/* Defined in Rust. */
#ifndef __BINDGEN__
int virtio_rdma_rust_req_notify_cq(struct ib_cq *cq, u32 flags);
int virtio_rdma_rust_modify_srq(struct ib_srq *srq, struct ib_srq_attr *attr,
				u32 mask, struct ib_udata *udata);
struct ib_mr *virtio_rdma_rust_alloc_mr(struct ib_pd *pd, u32 mr_type,
					u32 max_num_sg);
#endif

int virtio_rdma_req_notify_cq(struct ib_cq *cq, enum ib_cq_notify_flags flags);
int virtio_rdma_modify_srq(struct ib_srq *srq, struct ib_srq_attr *attr,
			   enum ib_srq_attr_mask mask, struct ib_udata *udata);
struct ib_mr *virtio_rdma_alloc_mr(struct ib_pd *pd, enum ib_mr_type mr_type,
				   u32 max_num_sg);
enum rdma_link_layer virtio_rdma_get_link_layer(struct ib_device *dev,
						u32 port);

#endif /* _VIRTIO_RDMA_HELPERS_H */
